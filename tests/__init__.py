"""Tests; helpers that several of them share live beside this file."""
