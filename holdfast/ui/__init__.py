"""The user interface: command line, live table, HTTP, reports and charts."""
