"""What the command line reports in plain words: a mistake of the user's, or a run that broke."""

# What the line about a user's mistake starts with, on stderr: the supervisor finds it in a part's log.
MISTAKE = "megatron-stream: error: "


class UserError(Exception):
    """A mistake of the user's: one line that says what is wrong and what to do.

    The command line prints the message without a stack trace and exits with code 2.
    """


class RunError(RuntimeError):
    """A part of a run ended or does not answer; the message names it. Printed without a trace, exit code 1."""
