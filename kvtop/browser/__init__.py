"""The console in a browser: one server, and one console process for each open tab."""
