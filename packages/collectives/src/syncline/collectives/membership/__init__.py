"""Groups that outlive some of their ranks. The other ranks agree on who is left, and connect anew."""
