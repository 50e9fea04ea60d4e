"""Groups that outlive some of their ranks: who is left is agreed in a store, then those connect anew."""
