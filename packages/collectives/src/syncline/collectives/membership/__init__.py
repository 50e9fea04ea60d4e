"""Groups that outlive some of their ranks: who is left is agreed, in a store or by a library, then those connect anew."""
