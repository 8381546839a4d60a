"""How a flow could be protected: what it does is measured, what protections would cost and take
is predicted by models that were fitted to a benchmark, and the cheapest that will do is named."""
