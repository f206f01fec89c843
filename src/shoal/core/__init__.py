"""Facts, costs, plans and contracts: what everything else is made of. Knows no network and no
model.
"""
