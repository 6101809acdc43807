"""What needs another library: each file needs the one that it is called after.

Trainers, such as those of ``lightning`` and ``transformers``, have a ``LeakCallback``
around a LeakDetector, and ``WholeEpochs``, with which every epoch has all samples;
``ray`` has an executor for ``pack``.
"""
