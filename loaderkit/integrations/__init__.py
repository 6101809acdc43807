"""Callbacks for trainers; each file needs the trainer it is called after.

``lightning`` and ``transformers`` each have a ``LeakCallback`` around a LeakDetector.
"""
