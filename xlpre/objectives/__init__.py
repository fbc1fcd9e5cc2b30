"""What is predicted from what, as data: ranks and targets. The model does not know which objective made them."""
