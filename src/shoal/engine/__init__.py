"""Who runs when: rounds, lanes, and how backward gets in and is weighed."""
