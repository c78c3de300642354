"""What is said where a result cannot be certified."""


class CertificateWarning(UserWarning):
    """A result that its own certificate does not support, or a run that cannot have one."""
