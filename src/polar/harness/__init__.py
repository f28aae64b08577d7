"""The harness CLIs, one file each: install, configure, command, conformance."""
