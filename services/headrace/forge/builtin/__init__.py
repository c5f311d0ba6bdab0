"""Functions that come with Headrace and run as any other."""
