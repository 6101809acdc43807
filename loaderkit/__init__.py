"""Datasets, loaders and tests whose memory stays flat.

Begin with eight names: ``pack`` and ``open_cache`` make and open a cache,
``SafeDataset`` is a dataset as a class, ``build_loader`` gives its DataLoader,
``LeakDetector`` watches a training loop, ``plan_batch`` finds the largest batch that
fits, ``diagnose_oom`` reads an out-of-memory error, ``check_environment`` judges the
settings of this process.

What these return, their options and their errors are in the rooms, in reading order;
each one's docstring says what is inside:

    errors    LoaderkitError and those below it
    units     format_bytes, parse_bytes
    testing   assert_same, and contracts for storages and columns of your own
    cache     write once, map many
    memory    readings, limits, who holds what, giving back
    datasets  samples that their reader owns
    loader    a DataLoader that says why
    leaks     does memory grow, and who holds it; the pytest plugin
    budget    will it fit, what to change, why did it run out
    cli       the ``loaderkit`` command

The names are listed once, in ``__init__.pyi``, which type checkers read too.  They load
on first use: importing loaderkit does not import torch.
"""

import lazy_loader

__version__ = "0.2.0"

_load, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)


def __getattr__(name: str) -> object:
    try:
        return _load(name)
    except AttributeError:
        from loaderkit.front_door import no_such_name

        raise no_such_name(name, __all__) from None
