"""A metric that has no value, and why."""


class UndefinedError(ValueError):
    """A metric cannot be computed; the message is the reason. The Metric classes turn it into NaN with that reason."""
