"""What a training step needs at its peak, without a device and without its memory.

Read in this order.  ``train_step`` is one step as users write it; ``fake_tensors``,
``track`` and ``tracker`` run it with fake floats and log every byte
(``allocation_log``), with an optimizer that has its state (``optimizer_states``).
``call_arguments``, ``kernels``, ``kernel_calls``, ``layouts``, ``formulas``,
``accumulation``, ``sparse_fakes``, ``real_values``, ``index_ranges`` and
``unseen_memory`` know what fakes do not show; ``peaks`` and ``allocator`` read the peak
out of a log; ``estimate`` is the front door.  ``measure`` and ``extrapolate`` run small
real steps where a step cannot be tracked.
"""
