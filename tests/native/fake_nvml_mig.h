/* MIG of the fake NVML: layouts are changed by rewriting the state file, so that they outlive the process as real ones do.
 *   gpu.<i>.gi=<gi>,<profile>,<start>,<size>,<MiB>     a GPU instance without a compute instance yet
 *   gpu.<i>.mig_refuse=<nvmlReturn>                    creating a GPU instance fails with this
 *   gpu.<i>.mig_pending=1                              the mode changes only with a reset
 * Profiles are those of an 80 GB A100. */
typedef struct{u index,id,slices,size;const char*name;ull mib;int starts[9];}PROFILE;
static const PROFILE PROFILES[]={
  {0,19,1,1,"1g.10gb",9728,{0,1,2,3,4,5,6,-1}},{9,15,1,2,"1g.20gb",19968,{0,2,4,6,-1}},{1,14,2,2,"2g.20gb",19968,{0,2,4,-1}},
  {2,9,3,4,"3g.40gb",40192,{0,4,-1}},{3,5,4,4,"4g.40gb",40192,{0,-1}},{4,0,7,8,"7g.80gb",81152,{0,-1}}};
#define NPROFILES (sizeof PROFILES/sizeof*PROFILES)
static const PROFILE*by_id(u id){ for(size_t i=0;i<NPROFILES;i++)if(PROFILES[i].id==id)return&PROFILES[i]; return 0; }
static const PROFILE*by_name(const char*n){ for(size_t i=0;i<NPROFILES;i++)if(!strcmp(PROFILES[i].name,n))return&PROFILES[i]; return 0; }
/* Lines that begin with `drop` go, `add` comes (each may be empty); one rename. */
static R edit(const char*drop,const char*add){ const char*f=getenv("FAKE_NVML_FILE"); if(!f)return UNKNOWN; pthread_mutex_lock(&mu); load();
  char name[4096]; snprintf(name,sizeof name,"%s.%d",f,(int)getpid()); FILE*h=fopen(name,"w"); if(!h){pthread_mutex_unlock(&mu);return NOPERM;}
  for(char*p=buf;*p;){ char*e=strchr(p,'\n'); size_t n=e?(size_t)(e-p):strlen(p); if(n&&!(*drop&&!strncmp(p,drop,strlen(drop))))fprintf(h,"%.*s\n",(int)n,p); p+=n+(e?1:0); }
  if(*add)fprintf(h,"%s\n",add);
  fclose(h); rename(name,f); pthread_mutex_unlock(&mu); return OK; }
typedef struct{char profile[32];u gi,start,size;ull mib;int has_ci;char uuid[96];}G;
/* GPU instance number n of a card, with or without a compute instance */
static int instance(int card,int n,G*g){ S s; int k=0; memset(g,0,sizeof*g);
  for(;slice(card,k,&s);k++)if(k==n){ snprintf(g->profile,32,"%s",s.profile); g->gi=s.gi; g->start=s.start; g->size=s.size; g->mib=s.total>>20; g->has_ci=1; snprintf(g->uuid,96,"%s",s.uuid); return 1; }
  char key[64],b[160]; snprintf(key,64,"gpu.%d.gi",card); return get_n(key,n-k,b,sizeof b,NULL)&&sscanf(b,"%u,%31[^,],%u,%u,%llu",&g->gi,g->profile,&g->start,&g->size,&g->mib)==5; }
#define GIH(card,gi) ((D)(size_t)(0x20000000+(card)*256+(gi)))
#define CIH(card,gi) ((D)(size_t)(0x40000000+(card)*256+(gi)))
static int from(D h,size_t base,int*card,G*g){ size_t v=(size_t)h-base; *card=(int)(v/256); for(int n=0;instance(*card,n,g);n++)if(g->gi==v%256)return 1; return 0; }
static int busy(D d){ char key[64],b[64]; snprintf(key,64,"gpu.%d.proc",(int)(size_t)d-1); return get_n(key,0,b,64,NULL); }
X R nvmlDeviceSetMigMode(D d,u mode,R*status){ CHK(d); char b[8],drop[64],add[64]; *status=OK; if(!gstr(d,"mig",b,8,NULL))return NOSUP; if(busy(d)){*status=19;return OK;}
  if(gnum(d,"mig_pending",0)){*status=OK;return OK;} snprintf(drop,64,"gpu.%d.mig=",(int)(size_t)d-1); snprintf(add,64,"gpu.%d.mig=%u",(int)(size_t)d-1,mode); return edit(drop,add); }
typedef struct{u version,id,p2p,slices,instances,sms,ce,dec,enc,jpeg,ofa;ull mib;char name[96];}GP;
X R nvmlDeviceGetGpuInstanceProfileInfoV(D d,u index,GP*o){ CHK(d); for(size_t i=0;i<NPROFILES;i++)if(PROFILES[i].index==index){ u v=o->version; memset(o,0,sizeof*o); o->version=v; o->id=PROFILES[i].id; o->slices=PROFILES[i].slices;
  for(const int*s=PROFILES[i].starts;*s>=0;s++)o->instances++; o->mib=PROFILES[i].mib; snprintf(o->name,96,"MIG %s",PROFILES[i].name); return OK; } return NOSUP; }
typedef struct{u start,size;}PL;
X R nvmlDeviceGetGpuInstances(D d,u id,D*a,u*n){ CHK(d); if(!gnum(d,"mig",0))return NOSUP; const PROFILE*p=by_id(id); if(!p)return INVAL; G g; u c=0; for(int i=0;instance((int)(size_t)d-1,i,&g);i++)if(!strcmp(g.profile,p->name))a[c++]=GIH((size_t)d-1,g.gi); *n=c; return OK; }
X R nvmlDeviceCreateGpuInstanceWithPlacement(D d,u id,const PL*pl,D*o){ CHK(d); if(!gnum(d,"mig",0))return NOSUP; R e=(R)gnum(d,"mig_refuse",0); if(e)return e; const PROFILE*p=by_id(id); if(!p)return INVAL; int ok=0; u gi=1; G g;
  for(const int*s=p->starts;*s>=0;s++)ok|=(u)*s==pl->start; if(!ok)return INVAL;
  for(int i=0;instance((int)(size_t)d-1,i,&g);i++){ if(pl->start<g.start+g.size&&g.start<pl->start+p->size)return 23; if(g.gi>=gi)gi=g.gi+1; }
  char add[160]; snprintf(add,160,"gpu.%d.gi=%u,%s,%u,%u,%llu",(int)(size_t)d-1,gi,p->name,pl->start,p->size,p->mib); *o=GIH((size_t)d-1,gi); return edit("",add); }
X R nvmlGpuInstanceDestroy(D h){ int card; G g; if(!from(h,0x20000000,&card,&g))return INVAL; if(g.has_ci)return 19; char drop[64]; snprintf(drop,64,"gpu.%d.gi=%u,",card,g.gi); return edit(drop,""); }
X R nvmlGpuInstanceGetInfo(D h,GI*o){ int card; G g; if(!from(h,0x20000000,&card,&g))return INVAL; memset(o,0,sizeof*o); o->id=g.gi; o->placement.start=g.start; o->placement.size=g.size; const PROFILE*p=by_name(g.profile); o->profileId=p?p->id:0; return OK; }
X R nvmlDeviceGetGpuInstanceById(D d,u id,D*o){ CHK(d); G g; for(int i=0;instance((int)(size_t)d-1,i,&g);i++)if(g.gi==id){ *o=GIH((size_t)d-1,id); return OK; } return NOTFOUND; }
typedef struct{u version,id,slices,instances,sms,ce,dec,enc,jpeg,ofa;char name[96];}CP;
X R nvmlGpuInstanceGetComputeInstanceProfileInfoV(D h,u profile,u engine,CP*o){ int card; G g; static const u n[]={1,2,3,4,7,8,6}; if(!from(h,0x20000000,&card,&g)||engine)return INVAL; const PROFILE*p=by_name(g.profile); if(!p||profile>6||n[profile]>p->slices)return NOSUP;
  u v=o->version; memset(o,0,sizeof*o); o->version=v; o->id=profile; o->slices=n[profile]; o->instances=p->slices/n[profile]; return OK; }
X R nvmlGpuInstanceCreateComputeInstance(D h,u profile,D*o){ int card; G g; (void)profile; if(!from(h,0x20000000,&card,&g))return INVAL; if(g.has_ci)return 23; char drop[64],add[320]; snprintf(drop,64,"gpu.%d.gi=%u,",card,g.gi);
  snprintf(add,320,"gpu.%d.slice=MIG-fake-%d-%u-%u,%s,%u,0,%u,%u,%llu,0",card,card,g.gi,g.start,g.profile,g.gi,g.start,g.size,g.mib<<20); *o=CIH(card,g.gi); return edit(drop,add); }
X R nvmlGpuInstanceGetComputeInstances(D h,u profile,D*a,u*n){ int card; G g; if(!from(h,0x20000000,&card,&g))return INVAL; const PROFILE*p=by_name(g.profile); static const u c[]={1,2,3,4,7,8,6}; *n=0; if(g.has_ci&&p&&profile<7&&c[profile]==p->slices){ a[0]=CIH(card,g.gi); *n=1; } return OK; }
X R nvmlComputeInstanceDestroy(D h){ int card; G g; if(!from(h,0x40000000,&card,&g)||!g.has_ci)return INVAL; char drop[192],add[160]; snprintf(drop,192,"gpu.%d.slice=%s,",card,g.uuid); snprintf(add,160,"gpu.%d.gi=%u,%s,%u,%u,%llu",card,g.gi,g.profile,g.start,g.size,g.mib); return edit(drop,add); }
