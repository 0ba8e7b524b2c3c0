"""Programs that train a project's models with tiny configurations, where the project's own need data or weights."""
