"""The memory, traffic and time of a step on devices that need not be there."""
