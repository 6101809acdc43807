"""What can have grown, a file for each way to find it.

Read ``evidence`` first: what a finder is given, and what it gives. ``items`` says what
is in a container, ``bounds`` how many it can hold, ``resources`` what else a process
can have more of. Then, in the order in which they are asked: ``grown_containers``,
``autograd_chain``, ``growing_array`` with ``array_holder``, ``new_objects``,
``replaced_containers``, ``rebuilt_values``; beside them ``left_shared_memory``,
``child_processes`` and, for what none of these explains, ``unattributed``. The rows are
in ``leaks/blame.py``: a new finder is a file here and a row there.
"""
