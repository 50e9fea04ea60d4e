"""Memory that processes of one machine share: making it, handing it over, and how much there may be. Nothing of MPI."""
