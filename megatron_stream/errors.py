"""The one exception for what a user can mend."""


class UserError(Exception):
    """A mistake of the user's: one line that says what is wrong and what to do.

    The command line prints the message without a stack trace and exits with code 2.
    """
