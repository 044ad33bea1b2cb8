"""What is concluded from a recording: rules that say why attention is slow and what to try."""

from flashdig.findings.finding import Advice, Finding, Gain, Number
from flashdig.findings.rules import find_in_counters, find_in_trace

__all__ = ["Advice", "Finding", "Gain", "Number", "find_in_counters", "find_in_trace"]
