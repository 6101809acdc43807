"""A training step in pieces that equals the whole and survives running out of memory.

Read in this order.  ``micro_batch`` is the front door, ``options`` checks what it is
built of; ``step_state`` puts back what a piece changed, ``update`` does the same for
the optimizer, ``ranks`` keeps several processes together, ``comparison`` checks pieces
against the whole.
"""
