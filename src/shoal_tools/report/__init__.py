"""Reports for people: tables, sentences and pages."""
