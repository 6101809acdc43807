"""build_loader: a torch DataLoader whose every setting has a reason.

Read ``description`` (the dataset, asked once), ``facts`` (all that is known, pure) and
``read_facts`` (which reads it), ``decisions`` and ``plan`` (what follows, pure),
``samplers`` (which samples make a batch, pure) and ``batching`` (which of that was
asked for), then ``build`` and ``planned`` (the loader), ``loader_states`` (what
``state_dict`` gives), ``resumable`` (batches from anywhere), ``agreement`` (ranks
compare what their order follows from), ``fetching`` (what runs in a worker),
``users_errors`` (what is raised when the user's code fails), ``read_ahead`` (batches
made ahead by a thread) and ``device_prefetch`` (batches moved to the device ahead of
time).
"""
