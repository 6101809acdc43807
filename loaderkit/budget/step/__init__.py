"""What a training step needs at its peak, without a device and without its memory.

Read in this order.  ``train_step`` is one step as users write it; ``step_copies``
copies all that it uses, ``users_state`` finds what no copy stands for, and
``state_snapshots`` puts it back; ``fake_tensors``, ``track`` and ``tracker`` run it
with fake floats, with an optimizer that has its state (``optimizer_states``).
``storage_ledger`` logs every byte (``allocation_log``) and who made it
(``running_module``, ``tracked_calls``, ``checkpoint_count``); ``output_cache``
remembers what operators gave for fakes, as long as ``remembered`` says (``newest``).
``call_arguments``, ``kernels``, ``kernel_calls``, ``layouts``, ``formulas``,
``accumulation``, ``sparse_fakes``, ``real_values``, ``index_ranges`` and
``unseen_memory`` know what fakes do not show; ``peaks`` and ``allocator`` read the peak
out of a log; ``estimate`` is the front door.  ``measure`` and ``extrapolate`` run small
real steps where a step cannot be tracked.

``devices`` is the table of kinds of devices.  What a CUDA GPU does otherwise than this
CPU is in ``cuda_autocast`` (types), ``cuda_functions`` with ``cuda_attention``,
``cuda_multi_head`` and ``cuda_recurrent`` (functions that are made of other operators),
``cuda_kernels`` and ``reductions`` (what a kernel takes beside its operands).  What a
step reads, and fakes do not know, is in ``value_answers`` with ``assumed_scalars`` and
``count_bounds``, ``unknown_values``, ``overwritten_values``, ``held_by_values`` and
``shape_rules``; errors of the step in ``step_errors`` and
``misplaced``; ``history`` and ``page`` show the estimate.  A real step is run within a
bound (``bounded_run``), with a copy of the optimizer (``optimizer_copies``), and its
memory is read by torch's profiler (``memory_profile``).
"""
