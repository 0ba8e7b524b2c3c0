"""Replace modules by optimised ones (`module_replace`): one file for each kind of module."""
