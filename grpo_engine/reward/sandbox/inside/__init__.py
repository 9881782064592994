"""What runs inside the sandbox: Python's standard library only, imported relatively (the folder is mounted alone)."""
