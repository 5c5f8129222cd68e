"""What ``easyrl doctor`` looks at before a run, and what a run looks at as it starts.

A file holds one family of checks; each gives findings (``finding.py``). ``build/doctor.py`` says in
which order.
"""
