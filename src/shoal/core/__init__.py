"""Facts, costs and plans: the data. It knows no network and no model."""
