"""What a person sees: the command line, the live table, HTTP, reports and pictures."""
