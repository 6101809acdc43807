"""build_loader: a torch DataLoader whose every setting has a reason.

Read ``facts`` (what is known), ``plan`` (what follows, pure), ``samplers`` (which
samples make a batch, pure), then ``build`` and ``planned`` (the loader), ``resumable``
(batches from anywhere), ``agreement`` (ranks compare what their order follows from),
``fetching`` (what runs in a worker), ``users_errors`` (what is raised when the user's
code fails), ``randomness`` (seeded for a batch, put back for the training) and
``prefetch`` (batches made, or moved to the device, ahead of time).
"""
