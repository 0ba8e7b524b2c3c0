"""The one place where names with an underscore are taken from torch: one file per subsystem, imported one by one.

Each name is given a public one here, with the reason why it is needed and what may replace it. Functions and classes
are the same objects under another name, and attributes of torch's objects are read by ``operator.attrgetter``, which
is no Python call: nothing is added to a training step. Dynamo cannot trace an ``attrgetter``, so none is called in
code that is compiled. ``tests/runtime/test_torch_internals.py`` lists all names, and finds them in the torch that is
installed. A constant ``ATTRIBUTES_OF`` names the modules (of torch, or others that are handled alike) whose source
defines the attributes that a file reads.
"""
