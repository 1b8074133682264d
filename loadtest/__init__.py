"""Load client, benches, reports, models made on the spot, and studies, each a package."""
