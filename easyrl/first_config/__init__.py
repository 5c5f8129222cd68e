"""``easyrl init``: what a first run needs to be told, asked, checked, and written as a file."""
