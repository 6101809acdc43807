"""What needs another library: each file needs the one that it is called after.

``lightning`` and ``transformers`` each have a ``LeakCallback`` around a LeakDetector;
``ray`` has an executor for ``pack``.
"""
