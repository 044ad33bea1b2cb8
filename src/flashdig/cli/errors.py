"""Errors that a command reports in one line; everything else is a bug and shows its traceback."""

from __future__ import annotations


class CommandError(Exception):
    """A message for the user and the exit code that goes with it."""

    exit_code = 1


class UsageError(CommandError):
    """An argument is wrong; the message names it and what is allowed."""

    exit_code = 2


class UnreadableInputError(CommandError):
    """A file cannot be read as what it should be; the message names the file."""

    exit_code = 3
