"""Groups made of other groups, and torch's groups seen as ours."""
