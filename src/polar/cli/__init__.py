"""The `polar` command."""
