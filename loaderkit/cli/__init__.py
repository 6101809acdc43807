"""The ``loaderkit`` command: parse, call one function, print what it returns.

Read main.py first.  demo.py packs real molecules (molecules.py), trains on them, and
compares ways to read them.
"""
