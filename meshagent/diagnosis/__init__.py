"""Why is a peer not visible? Facts about this machine and mesh, and a verdict on each.

`probes` asks the world and judges nothing; `folder`, `network`, `nodes` and `peers` judge what
they are given and ask nothing; `examination` puts the two together. Nothing here changes a file.
"""
