"""What several tests share: flows, servers, models, and what is done to runs."""
