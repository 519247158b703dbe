"""The judges that ship with stepspec, one in each module. A judge of kind `yes-no` is in `yes_no.py`."""
