"""What operates the stack: the command line, the report, and the demo."""
