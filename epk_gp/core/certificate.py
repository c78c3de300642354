"""What a result or a run says of itself, and the warning where it does not hold."""


class CertificateWarning(UserWarning):
    """A result that its own certificate does not support, or a run that cannot have one."""
