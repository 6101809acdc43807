"""What needs another library: each file needs the one that it is called after.

Trainers, such as those of ``lightning`` and ``transformers``, have a ``LeakCallback``
around a LeakDetector; ``ray`` has an executor for ``pack``.
"""
