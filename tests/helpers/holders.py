"""Objects that hold others, of classes that a new process can import."""

import threading


class Holder:
    """Holds something, as a dataset holds its counter or lock."""

    def __init__(self, held):
        self.held = held


class LeavesOut:
    """Has what cannot be sent, and leaves it out of its pickle."""

    def __init__(self):
        self.lock, self.number = threading.Lock(), 3

    def __getstate__(self):
        return {"number": self.number}


class Slotted:
    """Has no ``__dict__``."""

    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held
