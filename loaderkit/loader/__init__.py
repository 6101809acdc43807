"""build_loader: a torch DataLoader whose every setting has a reason.

Read ``description`` (the dataset, asked once), ``facts`` (all that is known, pure) and
``read_facts`` (which reads it), ``decisions`` and ``plan`` (what follows, pure),
``samplers`` (which samples make a batch, pure) and ``batching`` (which of that was
asked for), then ``build``, ``loader_setup`` (what it decided) and ``planned`` (the
loader).  A loader consists of ``loader_state`` (where it stands) and ``state_format``
(the form of its ``state_dict``, pure), ``resumable`` (batches from anywhere),
``inner_loader`` (the DataLoader that reads) and ``epochs`` (an iteration);
``sampler_protocol`` has what a user's sampler is asked, and ``dataset_changes`` what
was assigned to a dataset while workers were kept.  Then come
``agreement`` (ranks compare what their order follows from), ``fetching`` and
``delivery`` (what runs in a worker, and what it sends), ``users_errors`` (what is
raised when the user's code fails), ``worker_deaths`` (what is raised when a worker
dies), ``unlike_samples`` (why samples were not joined: ``sample_differences``,
``refused_values``), ``read_ahead`` (batches made ahead by a thread) and
``device_prefetch`` (batches moved to the device ahead of time).

What else there is, by what you look for: ``options`` and ``keywords`` (what can be
asked for); ``probe``, ``forecast``, ``reading`` and ``downloads`` (what a plan is made
from); ``iterables``, ``user_batches`` and ``limits`` (streams, samplers of the user's,
and sizes that bound a batch); ``lengths_told`` (loops that count the batches of another
epoch); ``stateful``, ``digests``, ``seeds`` and
``sampler_epochs`` (what a state counts on); ``collating``,
``pipes`` and ``page_locking`` (what is done with a batch); ``failures``,
``sample_names`` and ``missing_rows`` (errors, and the names in them);
``worker_start`` and ``worker_processes`` (workers that cannot start, and that are to
be ended); ``assigned`` (settings that
are assigned to a built loader); ``page`` (the plan as a page).
"""
