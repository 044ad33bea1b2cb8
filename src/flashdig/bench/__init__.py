"""The harness: correct first, then timed, then recorded."""
