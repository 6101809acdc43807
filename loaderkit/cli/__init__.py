"""The ``loaderkit`` command: parse, call one function, print what it returns.

Reading order: main.py builds the parser and dispatches; command.py says what a command
is and holds the arguments that several share; then one file a command (pack.py,
inspect.py, verify.py, push.py, pull.py, demo.py, watch.py, explain.py, plan.py,
doctor.py).  They import what they call when they run, so that ``--help`` is quick.

output.py prints an answer, as text or JSON, and is where a closed pipe ends quietly;
named_objects.py finds ``module:name``; typed_words.py writes fixes of errors as
options; completion.py completes commands in shells. examination.py is what ``doctor``
shows, and examination_page.py its page; molecule_demo.py packs real molecules
(molecules.py), trains on them, and compares ways to read them.
"""
