"""What the command line reports in plain words: a mistake of the user's, or a run that broke."""


class UserError(Exception):
    """A mistake of the user's: one line that says what is wrong and what to do.

    The command line prints the message without a stack trace and exits with code 2.
    """


class RunError(RuntimeError):
    """A part of a run ended or does not answer; the message names it. Printed without a trace, exit code 1."""
