"""``simulate``, ``capacity`` and ``tune``: the decision core on modelled devices, in virtual time."""
