"""What this machine has, and how memory moves between processes and devices.

Read ``host`` first (limits of this process), then ``probes`` (what a device can do) and
``parcel`` (a batch as one segment of shared memory).
"""
